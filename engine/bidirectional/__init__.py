"""Models whose tokens attend to later ones, too, as encoders do: they give vectors, and generate nothing."""
