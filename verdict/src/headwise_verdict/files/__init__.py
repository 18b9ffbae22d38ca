"""Durable files, ownership, text of strangers, and errors: what the other rooms stand on.

This is a door: what files of other parts take from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise_verdict.files.doors import door

if TYPE_CHECKING:
    from headwise_verdict.files.cached_text import data_folder as data_folder
    from headwise_verdict.files.declared_options import argument as argument
    from headwise_verdict.files.declared_options import option as option
    from headwise_verdict.files.declared_options import takes_options_of as takes_options_of
    from headwise_verdict.files.durable import as_record as as_record
    from headwise_verdict.files.durable import read_json as read_json
    from headwise_verdict.files.durable import read_lines as read_lines
    from headwise_verdict.files.durable import restore_lines as restore_lines
    from headwise_verdict.files.errors import count as count
    from headwise_verdict.files.errors import explain as explain
    from headwise_verdict.files.errors import is_for_users as is_for_users
    from headwise_verdict.files.foreign_text import printable as printable
    from headwise_verdict.files.foreign_text import spell_out as spell_out
    from headwise_verdict.files.ownership import plain_folder as plain_folder
    from headwise_verdict.files.ownership import refuse_link as refuse_link

# each name with its module, imported on first use
_DOOR = {
    # an error of the file system as an error for users
    "explain": "errors",
    # whether an error is printed without a traceback
    "is_for_users": "errors",
    # a JSON file, or None if it is absent or torn
    "read_json": "durable",
    # the records of a file of JSON lines
    "read_lines": "durable",
    # the record of one such line, or None if it is torn
    "as_record": "durable",
    # set such a file to exactly these records
    "restore_lines": "durable",
    # make a folder inside one of headwise's, through no link
    "plain_folder": "ownership",
    # refuse a path of headwise's that is a link
    "refuse_link": "ownership",
    # text of strangers without what acts on a terminal
    "printable": "foreign_text",
    # let a terminal show what its encoding lacks
    "spell_out": "foreign_text",
    # the folder of data sets
    "data_folder": "cached_text",
    # a number with its noun
    "count": "errors",
    # a field of a request that is an option
    "option": "declared_options",
    # a field of a request that is an argument
    "argument": "declared_options",
    # give a command the options of a request
    "takes_options_of": "declared_options",
}
__getattr__, __all__ = door(__name__, _DOOR)
