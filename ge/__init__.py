"""GE graphs of Ascend: read, checked and re-executed without an NPU."""
