"""Settings of Hypothesis: no test asserts on time."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("tenuto", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tenuto")
