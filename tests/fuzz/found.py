"""What a case ends with that shows a broken promise."""


class Found(AssertionError):
    """kind: what findings of one cause have in common."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
