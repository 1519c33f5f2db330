"""What this machine can do for a package: ``qwen-mtp doctor``."""
