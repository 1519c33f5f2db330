"""Qwen3.5/3.6 with native multi-token prediction, compiled to graphs."""
