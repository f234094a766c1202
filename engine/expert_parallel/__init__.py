"""Expert parallelism: ranks divide a step's rows, and send them to the ranks that have their experts."""
