"""LoRA adapters as models: --lora-modules, POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""
