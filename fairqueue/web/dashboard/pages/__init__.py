"""The pages, one module each, and their routes."""

from starlette.routing import BaseRoute

from fairqueue.web.dashboard.pages import (
    audit,
    failed,
    overview,
    partitions,
    run,
    runs,
    schedule,
    schedule_form,
    schedules,
    search,
    settings,
    tenants,
    user,
    users,
    workers,
)

ROUTES: list[BaseRoute] = [
    *overview.ROUTES,
    *search.ROUTES,
    *schedules.ROUTES,
    *schedule_form.ROUTES,
    *schedule.ROUTES,
    *tenants.ROUTES,
    *users.ROUTES,
    *user.ROUTES,
    *runs.ROUTES,
    *run.ROUTES,
    *failed.ROUTES,
    *workers.ROUTES,
    *partitions.ROUTES,
    *audit.ROUTES,
    *settings.ROUTES,
]
