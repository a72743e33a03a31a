"""Opens services: loads the model that the settings name, and opens the journal or joins the fleet that they name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tenuto.base.config import WorkerSettings, user_path
from tenuto.base.errors import ConfigError
from tenuto.base.wire.replies import AnyReply
from tenuto.runtime.member import Member
from tenuto.runtime.models import Model, load_model, memory_bytes, server_budget
from tenuto.runtime.object_store import open_store
from tenuto.runtime.service import Service
from tenuto.session.journal import Journal
from tenuto.session.postgres.database import Database


def open_service(settings: WorkerSettings, send: Callable[[AnyReply], None]) -> Service:
    """Loads a model and opens a service for it. Raises `ModelError`, `ConfigError` or `ExtraMissing`."""
    store = open_store(settings.shared_tier) if settings.shared_tier is not None else None
    model = load_model(settings)
    config = model.configured(settings.config)
    memory = memory_bytes(settings)
    if memory is None:
        memory = server_budget(model, config)
    return Service(
        model,
        config,
        memory,
        send,
        journal=open_journal(settings, model),
        member=join_fleet(settings, model),
        adapters=settings.adapters,
        store=store,
    )


def join_fleet(settings: WorkerSettings, model: Model) -> Member | None:
    """Joins the fleet of the settings, if they name one. Raises `ConfigError` or `ExtraMissing`."""
    if settings.fleet is None:
        return None
    connect = partial(Database, settings.fleet)
    return Member(connect, model.fingerprint, settings.advertise or "", settings.fleet_lease)


def open_journal(settings: WorkerSettings, model: Model) -> Journal | None:
    """Opens the journal of the settings, if they name one. Raises `ConfigError`."""
    if settings.journal is None:
        return None
    try:
        path = user_path(settings.journal)
    except RuntimeError as error:  # the path names a user who does not exist
        raise ConfigError(f"the journal {settings.journal} cannot be used: {error}") from error
    return Journal(path, model.fingerprint)
