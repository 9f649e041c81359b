"""An executor over Ray actors, one for each rank."""
