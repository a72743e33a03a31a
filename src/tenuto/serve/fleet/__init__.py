"""A replica's requests to and for other replicas of its fleet."""
