"""LoRA adapters as PEFT writes them: what their config asks for, and the name by which services know one."""
