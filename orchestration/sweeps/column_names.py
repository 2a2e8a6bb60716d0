"""Guesses from the name of a column: whether its values name people, codes or picture files."""

from __future__ import annotations

import re
from typing import Final

_OF_PEOPLE: Final = re.compile(
    r"\b(?:u?id|user|person|people|patient|customer|client|member|subject|owner|author|household)\b", re.IGNORECASE
)
_OF_CODES: Final = re.compile(
    r"\b(?:zip|plz|postal|postleitzahl|cep|naics|sic|isco|nace|icd|cpt|drg|hcpcs|ndc|fips|geoid|ean|gtin|upc|sku|isbn|iban|"
    r"blz|ssn)\d*(?: (?:cm|pcs))?\b"
    r"|\b(?:ids?|uid|uuid|guid|codes?|zipcode|postcode|barcode|(?:user|customer|client|patient|member|person|product|item|"
    r"store|order|account|employee|student)id)(?: ?\d+)?$"
    r"|\b(?:phone|telephone|mobile|fax|account|serial|invoice|order|ticket|policy|card|case) (?:number|num|no|nr)$"
    r"|\b(?:phone|telephone|fax)$",
    re.IGNORECASE,
)


def may_name_people(name: str) -> bool:
    """Return whether a column of this name may say whose row it is.

    >>> [may_name_people(name) for name in ("userId", "customer_id", "members", "age")]
    [True, True, False, False]
    """
    return _OF_PEOPLE.search(_words(name)) is not None


def may_name_codes(name: str) -> bool:
    """Return whether numbers in a column of this name may be codes, which are no amounts.

    >>> [may_name_codes(name) for name in ("zip", "ZIPCode", "postal_code", "naics2", "icd10", "storeId", "phone no.")]
    [True, True, True, True, True, True, True]
    >>> [may_name_codes(name) for name in ("age", "zipper", "code_lines", "acid", "number_of_orders")]
    [False, False, False, False, False]
    """
    return _OF_CODES.search(_words(name)) is not None


def _words(name: str) -> str:
    """Return the words of a name with a blank between them, those in camel case too."""
    divided = re.sub(r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    return " ".join(re.findall(r"[^\W_]+", divided))
