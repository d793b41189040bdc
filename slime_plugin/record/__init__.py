"""The record of one rollout: a tape of tokens and the views of it that the policy saw.

The rollout side writes records and knows nothing of training; the training side reads them and knows nothing of
harnesses. :mod:`.schema` states the contract, :mod:`.checks` enforces it, :mod:`.report` is the part of the metadata
that rollouts write, :mod:`.interchange` the JSON form, :mod:`.store` the binary form, :mod:`.files` opens either.
"""

from slime_plugin.record.arrays import Span, View
from slime_plugin.record.files import Entry, read_entries, read_records
from slime_plugin.record.interchange import VERSION, dump_record, parse_record
from slime_plugin.record.meta import KINDS, STATUSES, Edit, Meta, Status
from slime_plugin.record.rollout_report import ConversationReport, RolloutReport, TurnReport
from slime_plugin.record.schema import Record
from slime_plugin.record.store import StoreWriter, scan_store

__all__ = [
    "KINDS",
    "STATUSES",
    "VERSION",
    "ConversationReport",
    "Edit",
    "Entry",
    "Meta",
    "Record",
    "RolloutReport",
    "Span",
    "Status",
    "StoreWriter",
    "TurnReport",
    "View",
    "dump_record",
    "parse_record",
    "read_entries",
    "read_records",
    "scan_store",
]
