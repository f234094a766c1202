"""Workers that keep their connection open but send nothing, or report that they do not serve."""
