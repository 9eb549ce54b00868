"""Models by name: finds them in the caches of Hugging Face and ModelScope, and downloads what is missing.

Only files that are read are fetched, never pickles, each checked by size and hash. Without torch.
"""

from inferplane.hub.headers import FindRanges
from inferplane.hub.location import Location
from inferplane.hub.lookup import fetch, fetch_headers, find, locate
from inferplane.hub.names import FORMS, ModelName, near_short_names, parse_name
from inferplane.hub.progress import DownloadProgress, report_on_stderr
from inferplane.hub.settings import HubSettings, forbid_downloads
from inferplane.hub.short_names import SHIPPED_NAMES

__all__ = [
    "FORMS",
    "SHIPPED_NAMES",
    "DownloadProgress",
    "FindRanges",
    "HubSettings",
    "Location",
    "ModelName",
    "fetch",
    "fetch_headers",
    "find",
    "forbid_downloads",
    "locate",
    "near_short_names",
    "parse_name",
    "report_on_stderr",
]
