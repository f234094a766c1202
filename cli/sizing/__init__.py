"""How many GPUs a model needs. Without it `serve` gives each worker one, unless --tp says otherwise."""
