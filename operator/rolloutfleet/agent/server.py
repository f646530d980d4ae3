"""The agent's HTTP API, on localhost: only containers of the trainer's pod reach it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from rolloutfleet.agent.collection.collections import Collections
from rolloutfleet.agent.errors import AgentError, conflict, invalid, unavailable
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.agent.memory import Memory
from rolloutfleet.agent.observing.observations import Observations
from rolloutfleet.agent.observing.routes import observing_routes, refuse_other_sites
from rolloutfleet.agent.sampling import Sampler
from rolloutfleet.agent.session import Session
from rolloutfleet.agent.sessions import Sessions
from rolloutfleet.agent.store.errors import StoreError, as_refusal
from rolloutfleet.agent.updates import Updater
from rolloutfleet.api.agent import (
    BeginUpdate,
    ErrorAnswer,
    ErrorBody,
    FleetView,
    Generate,
    Generated,
    JoinGroups,
    MemoryRequest,
    SendBucket,
    SenderDone,
    SendTensors,
    UpdateWeights,
)
from rolloutfleet.api.collection import Acknowledge, Collection, Evaluate, LeaseBatch
from rolloutfleet.kube.errors import ApiError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 30
READY_POLL_SECONDS = 0.2
COLLECTION = "/v1/servers/{role}/collection"
UPDATE = "/v1/servers/{role}/updates/{update}"

Request = TypeVar("Request", bound=BaseModel)


class Role:
    """All that one role of the annotation can do."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        leadership: Leadership,
        updater: Updater,
        sessions: Sessions,
        memory: Memory,
        sampler: Sampler,
        collections: Collections,
        observations: Observations,
    ) -> None:
        self.fleet = fleet
        self.leadership = leadership
        self.updater = updater
        self.sessions = sessions
        self.memory = memory
        self.sampler = sampler
        self.collections = collections
        self.observations = observations

    @property
    def server_name(self) -> str:
        return self.fleet.name

    def view(self) -> FleetView:
        lease = self.leadership.lease
        return self.fleet.view(leading=lease.valid, holder=lease.holder, fence=lease.fence)


def application(roles: dict[str, Role]) -> web.Application:
    app = web.Application(middlewares=[_errors_as_json, refuse_other_sites], client_max_size=MAX_BODY_BYTES)

    def role_of(request: web.Request) -> Role:
        name = request.match_info["role"]
        if name not in roles:
            known = ", ".join(sorted(roles))
            raise AgentError("UnknownRole", f"role {name}: this pod's annotation names {known}", status=404)
        return roles[name]

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def servers(_: web.Request) -> web.Response:
        return web.json_response({name: role.view().model_dump(mode="json") for name, role in roles.items()})

    async def server(request: web.Request) -> web.Response:
        return _answer(role_of(request).view())

    async def ready(request: web.Request) -> web.Response:
        """Wait until the fleet serves, with at least `routable` engines, and this agent leads it where it can."""
        role = role_of(request)
        wanted = int(request.query.get("routable", "1"))
        deadline = time.monotonic() + min(float(request.query.get("timeout", "30")), 60.0)
        while True:
            view = role.view()
            frozen = role.fleet.server is not None and not role.fleet.server.spec.update_weights
            if view.ready and view.routable >= wanted and (view.leading or frozen):
                return _answer(view)
            if time.monotonic() > deadline:
                raise unavailable(
                    "NotReady",
                    f"RolloutServer {view.server}: {view.state.value}, {view.routable} of {view.desired} engines "
                    f"routable (wanted {wanted}), leader {view.holder or 'nobody'}; {view.message}",
                )
            await asyncio.sleep(READY_POLL_SECONDS)

    async def hold(request: web.Request) -> web.Response:
        sender = request.query.get("sender", "0")
        if not sender.isdigit():
            raise invalid("BadRequest", f"sender: {sender} is no number")
        return _answer(await update_of(request).hold(int(sender)))

    async def abandon(request: web.Request) -> web.Response:
        update_of(request).abandon(conflict("Abandoned", "the trainer has abandoned the update"))
        return web.json_response({})

    def update_of(request: web.Request) -> Session:
        return role_of(request).sessions.of(request.match_info["update"])

    def step(
        model: type[Request], perform: Callable[[Session, Request], Awaitable[BaseModel]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            return _answer(await perform(update_of(request), await _body(request, model)))

        return handle

    async def collection(request: web.Request) -> web.Response:
        return _answer(await role_of(request).collections.current.view())

    async def end_collection(request: web.Request) -> web.Response:
        await role_of(request).collections.end()
        return web.json_response({})

    async def batch(request: web.Request) -> web.Response:
        current = role_of(request).collections.current
        body = await current.batch(await _body(request, LeaseBatch))
        return web.Response(body=body, content_type="application/octet-stream")

    async def complete(request: web.Request) -> web.Response:
        body = await role_of(request).collections.complete(request.match_info["ticket"], await request.read())
        return web.Response(body=body, content_type="application/octet-stream")

    def operation(
        model: type[Request], perform: Callable[[Role, Request], Awaitable[BaseModel]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            role = role_of(request)
            return _answer(await perform(role, await _body(request, model)))

        return handle

    app.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/v1/servers", servers),
            web.get("/v1/servers/{role}", server),
            web.get("/v1/servers/{role}/ready", ready),
            web.post("/v1/servers/{role}/generate", operation(Generate, _generate)),
            web.post("/v1/servers/{role}/update-weights", operation(UpdateWeights, lambda r, b: r.updater.update(b))),
            web.post("/v1/servers/{role}/updates", operation(BeginUpdate, lambda r, b: r.sessions.begin(b))),
            web.get(UPDATE, hold),
            web.delete(UPDATE, abandon),
            web.post(f"{UPDATE}/groups", step(JoinGroups, lambda u, b: u.join_groups(b))),
            web.post(f"{UPDATE}/buckets", step(SendBucket, lambda u, b: u.send_bucket(b))),
            web.post(f"{UPDATE}/tensors", step(SendTensors, lambda u, b: u.send_tensors(b))),
            web.post(f"{UPDATE}/finish", step(SenderDone, lambda u, b: u.finish(b))),
            web.post("/v1/servers/{role}/offload", operation(MemoryRequest, lambda r, b: r.memory.offload(b))),
            web.post("/v1/servers/{role}/onload", operation(MemoryRequest, lambda r, b: r.memory.onload(b))),
            web.put(COLLECTION, operation(Collection, lambda r, b: r.collections.begin(b))),
            web.get(COLLECTION, collection),
            web.delete(COLLECTION, end_collection),
            web.post(f"{COLLECTION}/batches", batch),
            web.post(
                f"{COLLECTION}/acknowledge",
                operation(Acknowledge, lambda r, b: r.collections.current.acknowledge(b)),
            ),
            web.post(f"{COLLECTION}/evaluate", operation(Evaluate, lambda r, b: r.collections.evaluate(b))),
            web.post(f"{COLLECTION}/complete/{{ticket}}", complete),
            *observing_routes(role_of),
        ]
    )
    return app


async def _generate(role: Role, request: Generate) -> Generated:
    answer = await role.sampler.generate(request)
    for group in answer.groups:
        for sample in group.samples:
            role.observations.sample_ended(sample)
    return answer


async def _body(request: web.Request, model: type[Request]) -> Request:
    """Raises AgentError naming each wrong field."""
    try:
        return model.model_validate_json(await request.read())
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise invalid("BadRequest", "; ".join(problems), details=problems) from error


def _answer(model: BaseModel) -> web.Response:
    return web.Response(text=model.model_dump_json(), content_type="application/json")


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except AgentError as error:
        body = ErrorBody(code=error.code, message=error.message, details=error.details)
        status = error.status
    except StoreError as error:
        refusal = as_refusal(error)
        body, status = ErrorBody(code=refusal.code, message=refusal.message), refusal.status
    except ApiError as error:
        body = ErrorBody(code="KubernetesApi", message=error.message)
        status = 502
    except web.HTTPException as error:
        body = ErrorBody(code="Http", message=f"{request.method} {request.path}: {error.reason}")
        status = error.status
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        body = ErrorBody(code="Internal", message=f"{type(error).__name__}: {error}")
        status = 500
    return web.Response(text=ErrorAnswer(error=body).model_dump_json(), status=status, content_type="application/json")
