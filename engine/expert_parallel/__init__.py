"""Expert parallelism: rows of tokens are divided between ranks, and go to the ranks that have their experts."""
