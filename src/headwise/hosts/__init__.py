"""Hosts: one package or module for each way in which models call attention."""

from headwise.hosts.finding import find

__all__ = ["find"]
