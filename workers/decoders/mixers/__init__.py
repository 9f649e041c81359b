"""Mixers with a recurrent state, in torch. `Decoder` calls them; none knows of sequences, drafts or snapshots."""
