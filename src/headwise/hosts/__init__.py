"""The hosts: by which ways models reach attention."""

from headwise.hosts.finding import find

__all__ = ["find"]
