"""What sampling needs on the host, whatever computes the logits: state of sequences, noise, verification of drafts."""
