"""What a machine is: data sheets, the roofline's arithmetic, and from which files code may be loaded."""
