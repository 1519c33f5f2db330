"""The package loader, the sessions and the speculative loop: numpy and onnxruntime only."""
