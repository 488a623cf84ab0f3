"""The dashboard (placeholder during assembly)."""

from fastapi import APIRouter

router = APIRouter()
