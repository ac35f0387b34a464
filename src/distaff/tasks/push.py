"""`distaff push FOLDER ORG/NAME`: publish a folder on the Hub."""

from dataclasses import dataclass

from distaff.hub import push_folder
from distaff.tasks._flags import flag


@dataclass(kw_only=True)
class PushFlags:
    """Flags of `distaff push`."""

    folder: str = flag("", "Folder to publish; may stand first.", required=True)
    repo_id: str = flag("", "Repository, as ORG/NAME; may stand second.", required=True)
    token: str | None = flag(None, "Token of the Hub, by default the one that is logged in.")
    private: bool | None = flag(None, "Make the repository private.")
    commit_message: str = flag("Upload with distaff", "Message of the commit.")


def push(flags: PushFlags) -> int:
    """Push the folder and print its address."""
    address = push_folder(
        flags.folder, flags.repo_id, token=flags.token, private=flags.private, commit_message=flags.commit_message
    )
    print(address)
    return 0
