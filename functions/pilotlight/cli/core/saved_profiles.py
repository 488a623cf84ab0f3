"""Saves profiles of the profile file without losing an API key that is stored nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pilotlight.cli.core.session import Session

if TYPE_CHECKING:
    from pilotlight.profile import Profile


def saved_profile(session: Session, name: str) -> Profile | None:
    """The profile of that name as the file has it, without overrides of the environment; None if
    there is none."""
    from pilotlight import profile

    environ = session.profile_environ()
    if name not in profile.names(environ):
        return None
    in_file = {
        key: value
        for key, value in environ.items()
        if key in ("PILOTLIGHT_CONFIG", "HOME", "XDG_CONFIG_HOME")
    }
    return profile.load(in_file, name=name)


def free_profile_name(session: Session, url: str, *, preferred: str, otherwise: str) -> str:
    """`preferred`, or `otherwise` if that profile has a key of another platform than `url`."""
    held = saved_profile(session, preferred)
    is_ours = held is None or not held.api_key or held.url == url
    return preferred if is_ours else otherwise


def save_profile(session: Session, fresh: Profile, *, name: str, activate: bool) -> Path:
    """Save a profile and return the file. A profile of that name with another key is kept under a
    free name: it may be the only copy of its key."""
    from pilotlight import profile

    environ = session.profile_environ()
    file = profile.config_path(environ)
    held = saved_profile(session, name)
    if held is not None and held.api_key not in ("", fresh.api_key):
        taken = profile.names(environ)
        kept = next(
            free for n in range(1, len(taken) + 2) if (free := f"{name}-old-{n}") not in taken
        )
        profile.save(held, name=kept, path=file, activate=False)
        session.say(f"the login of profile {name!r} is kept as profile {kept!r}")
    return profile.save(fresh, name=name, path=file, activate=activate)
