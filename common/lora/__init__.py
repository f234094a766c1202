"""LoRA adapters in PEFT's format: their configuration, and references to them between services."""
