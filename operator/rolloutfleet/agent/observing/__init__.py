"""What is seen of a role's samples: Observations keeps it, and the page, Prometheus and the terminal show it."""
