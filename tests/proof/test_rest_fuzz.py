"""Whatever fits the served OpenAPI document, and what does not: each answer is as it says."""

from typing import Any

import pytest
import schemathesis
from helpers.rest import Api, make_app
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.types import ASGIApp, Receive, Scope, Send

from fairqueue.queue.queue import TaskQueue
from fairqueue.web.api.endpoint import PREFIX, Endpoint
from fairqueue.web.api.endpoints import ENDPOINTS

EXAMPLES = {GenerationMode.POSITIVE: 10, GenerationMode.NEGATIVE: 5}
# Ids of what is there: those that are made up are of nothing.
IDS = {
    "schedule_id": ["acme-daily"],
    "task_id": ["acme-failed", "acme-running", "acme-waiting"],
    "user_id": ["acme-ann"],
    "tenant": ["acme"],
    "key": ["acme:7"],
    "worker_id": ["worker-1"],
    "name": ["acme-mail"],
    "key_id": ["0123456789abcdef"],
}
# Rules that are some: those that are made up can never be read.
RULES: list[dict[str, Any]] = [
    {"cron_expr": "0 9 * * *"},
    {"every": 60},
    {"at": "2100-01-01T00:00:00Z"},
]
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


class Door:
    """The app of whichever test runs: the document is loaded once."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


@pytest.fixture(scope="module")
def door() -> Door:
    return Door(make_app(TaskQueue.from_url("redis://127.0.0.1:1")))  # never asked


@pytest.fixture(scope="module")
def schema(door: Door) -> Any:
    return schemathesis.openapi.from_asgi(f"{PREFIX}/openapi.json", door)


def make_sense(case: Any, pick: int) -> None:
    """Put ids and a rule that exist into a request, as far as it has places for them."""
    for name in case.path_parameters or {}:
        case.path_parameters[name] = IDS[name][pick % len(IDS[name])]
    for place in (case.body, case.query):
        if isinstance(place, dict) and "cron_expr" in place:
            for kind in ("cron_expr", "every", "at", "timezone", "windows", "exclude"):
                place.pop(kind, None)
            place |= RULES[pick % len(RULES)]


def cases() -> list[Any]:
    """Each endpoint with both modes; where nothing is asked for, nothing can be wrong."""
    return [
        pytest.param(endpoint, mode, id=f"{endpoint.name}-{mode.value}")
        for endpoint in ENDPOINTS
        for mode in EXAMPLES
        if mode is GenerationMode.POSITIVE or endpoint.role is not None
    ]


@pytest.mark.parametrize(("endpoint", "mode"), cases())
def test_answers_are_as_the_document_says(
    endpoint: Endpoint, mode: GenerationMode, schema: Any, door: Door, api: Api
) -> None:
    door.app = api.app
    described = schema[PREFIX + endpoint.path][endpoint.method]
    headers = {"Authorization": f"Bearer {api.keys['admin', None]}"}
    checks = CHECKS if 503 in endpoint.other_statuses else [*CHECKS, not_a_server_error]

    @settings(
        max_examples=EXAMPLES[mode],
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(described.as_strategy(generation_mode=mode), st.booleans(), st.integers(0, 2))
    def send(case: Any, is_real: bool, pick: int) -> None:
        if is_real:
            make_sense(case, pick)
        response = case.call(headers=headers)
        case.validate_response(response, checks=checks)

    send()
