"""The grammar libraries, each behind one face, and the choice among them."""
