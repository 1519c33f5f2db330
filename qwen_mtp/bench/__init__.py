"""Measures a package on this machine: what ``qwen-mtp bench`` runs and shows."""
