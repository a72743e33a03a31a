"""The journals of a fleet in one PostgreSQL database: sessions with their owners, and the leases of replicas."""
