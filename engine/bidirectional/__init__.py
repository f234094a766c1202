"""Models whose tokens also attend to later ones, as in encoders: they produce vectors and generate nothing."""
