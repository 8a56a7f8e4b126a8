"""All orders of what senders and the host may do to one sum slot, one result row and one op record."""
