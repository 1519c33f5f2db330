"""The model as torch modules, and the signatures of the graphs traced from it."""
