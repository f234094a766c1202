"""LoRA adapters: read from PEFT folders, cached by last use, added to linear layers of the rows that name one."""
