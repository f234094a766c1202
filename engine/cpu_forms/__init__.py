"""Forms of a model for the steps of a CPU, by their rows; answers that do not depend on what else is in the batch."""
