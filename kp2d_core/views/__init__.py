"""Views made of a photograph: where one comes to lie in another, in which light. No torch."""
