"""What a finished run is worth: samples, log Z, scores, modes, diagnosis, and the files that keep them."""
