"""Checkpoints: files that any safetensors reader opens, the same bytes whoever wrote them; see docs/checkpoints.md."""
