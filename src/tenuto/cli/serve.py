"""The command `tenuto serve`."""

from __future__ import annotations

from functools import partial

import typer

from tenuto.base.errors import EngineStopped
from tenuto.base.heap import HeapKeeper, return_large_blocks
from tenuto.base.interpreter import configure_interpreter, exempt_existing_objects
from tenuto.base.views import ModelView
from tenuto.cli.settings import ServerSettings
from tenuto.serve.engine_process import EngineProcess

ENGINE_ENDED = 70
"""The exit status if the engine process ended by itself: a supervisor should restart the server."""


def run_server(settings: ServerSettings) -> None:
    """Serves until a signal. Raises `ConfigError` or `ModelError`."""
    with EngineProcess(settings.worker) as engine:
        # The engine loads its model while this process imports the server's modules.
        import asyncio  # noqa: PLC0415 - loaded where it is used

        import uvloop  # noqa: PLC0415 - loaded where it is used

        from tenuto.base.logs import configure_logs  # noqa: PLC0415 - loaded where it is used
        from tenuto.serve.run import serve  # noqa: PLC0415 - loaded where it is used

        configure_logs(settings.worker.log_level)
        configure_interpreter()
        return_large_blocks()
        HeapKeeper().start()
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                in_fleet = settings.worker.fleet is not None
                runner.run(serve(engine, settings.serve, partial(_ready, settings), in_fleet=in_fleet))
        except EngineStopped as error:
            typer.echo(f"tenuto: {error}", err=True)
            raise typer.Exit(ENGINE_ENDED) from None


def _ready(settings: ServerSettings, model: ModelView, address: str) -> None:
    """Prints the resolved configuration and the address."""
    exempt_existing_objects()
    config = model.config
    units = ", ".join(f"{name} {count}" for name, count in model.units.items())
    if model.guess_bytes:
        units += f"; {model.guess_bytes / 2**20:.1f} MiB for guesses"
    steps = f"{config.token_budget} tokens a step ({config.mixed_budget} of several turns)"
    fits = f"{model.capacity_tokens} tokens fit" if model.capacity_tokens else "all sessions take the same memory"
    lines = [
        f"model      {model.model}{f' ({model.path})' if model.path else ''}",
        f"compute    {model.compute}",
        f"context    {model.context_length} tokens a session (the model's own limit is {model.max_context})",
        f"memory     {fits}, in pages of {model.page_size} ({units})",
        f"steps      {config.max_running} turns at once, {steps}",
        *([f"settings   {', '.join(settings.sources)}"] if settings.sources else []),
        f"listening  {address}  (API description at {address}/docs)",
    ]
    typer.echo("\n".join(lines))
