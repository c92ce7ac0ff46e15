"""The one exception of the library."""


class ShareError(ValueError):
    """A public call cannot be carried out; nothing was changed. The message names the cure."""
