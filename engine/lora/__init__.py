"""LoRA adapters: read from PEFT folders, kept by last use, and added to the linear layers of rows that name one."""
