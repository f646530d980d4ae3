"""The Kubernetes API as we use it: raw objects over HTTP, Leases, a work queue."""
