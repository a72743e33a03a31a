"""The Serve application of a fleet: `serve run tenuto.ray.application:fleet`, or `serve.run(fleet(Arguments(...)))`."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY
from ray.serve.config import RequestRouterConfig

from tenuto.ray.process import check
from tenuto.ray.replica import Replica
from tenuto.ray.router import SessionRouter

# Annotations are not postponed here, since Ray reads that of `fleet`.

STATS_SECONDS = 1.0
"""How often the replicas report to the request router."""
DEFAULTS: dict[str, Any] = {
    "max_ongoing_requests": 4096,  # the server has its own limits, and answers 429 and 503
    "graceful_shutdown_timeout_s": 300.0,  # streams end, then sessions move; Ray's default of 30 s would cut them off
    "graceful_shutdown_wait_loop_s": 0.5,
    "health_check_period_s": 5.0,
}
"""Options of the deployment that are not Ray's own defaults."""


class Arguments(BaseModel):
    """Arguments of `fleet`."""

    model_config = ConfigDict(extra="forbid")

    database: str | None = Field(None, description="The fleet's database; by default `TENUTO_FLEET` of each node.")
    server: dict[str, Any] = Field(default_factory=dict, description="Options of `tenuto serve`, as in `tenuto.toml`.")
    deployment: dict[str, Any] = Field(default_factory=dict, description="Options of `serve.deployment`.")
    router: dict[str, Any] = Field(default_factory=dict, description="Arguments of `SessionRouter.initialize_state`.")


def fleet(arguments: Arguments) -> Application:
    """Returns an application whose replicas form a fleet. Raises `ConfigError` for options that servers do not have, or
    that Ray decides."""
    options = {**arguments.server, **({"fleet": arguments.database} if arguments.database is not None else {})}
    check(options)
    defaults = {**DEFAULTS, **({} if RAY_SERVE_ENABLE_HA_PROXY else {"request_router_config": routing(arguments)})}
    deployment = serve.deployment(Replica, name="tenuto").options(**{**defaults, **arguments.deployment})
    return deployment.bind(options)


def routing(arguments: Arguments) -> RequestRouterConfig:
    """Returns the configuration of `SessionRouter`. Ray refuses it with HAProxy, which chooses replicas itself."""
    return RequestRouterConfig(
        request_router_class=f"{SessionRouter.__module__}.{SessionRouter.__name__}",
        request_router_kwargs=arguments.router,
        request_routing_stats_period_s=STATS_SECONDS,
    )
