"""The routes that look into jobs and at the machines that run them."""

from fastapi import APIRouter

from api import events

ROUTERS: tuple[APIRouter, ...] = (events.router,)
