"""Hosts: one package or module for each way in which models call attention."""

from headwise.attend.hosts.finding import find

__all__ = ["find"]
