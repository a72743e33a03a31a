"""A fleet on Ray Serve: Ray places the replicas, watches over them and balances requests; see docs/ray.md. Needs
`tenuto[ray]`."""
