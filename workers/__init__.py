"""One rank of one model replica, and what it is told and answers."""
