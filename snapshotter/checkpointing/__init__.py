"""Creation of snapshots from Templates, and the trial restore that proves each before use. Storage,
selection and restore are in `snapshots`."""
