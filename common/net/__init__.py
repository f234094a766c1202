"""What every service has on its network side: gRPC set-up, health, scraping, the cluster's token, addresses."""
