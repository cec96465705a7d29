"""Common English words that are one token each for the demo model, at the start of a text and after a space.

So a text of n of them has n tokens there; with another tokenizer it may have more.
"""

from __future__ import annotations

WORDS = """
able about above act after again age air all also always among and animal answer any area arm around art ask back
bad ball bank base bath bear beat bed before begin bell below best better big bird black blood blue board boat body
bone book born both box boy branch bread break bridge bright brother brown build burn but call came camp can car
card care case cat cause cell center chain chair change check child choose city class clean clear clock close cloth
cloud coast cold color come common complete cook cool corn cost count country course cover current cut dark day dead
deal deep design did die direct do doctor does dog door double down draw dream drive drop dry dust each ear early
earth east easy eat edge effect egg eight end engine enough equal even event ever every exact eye face fact fall
family famous far farm fast father feed feel feet few field fight fill final find fine finger finish fire first fish
five flat floor flow flower fly follow food foot for force forest form forward found four free fresh friend from
front fruit full game gas get girl give glass go gold gone good got grand grass great green ground group grow guess
guide gun had hair half hand happy hard has hat have he head heart heat heavy held help her here high hill him his
history hit hold hole home horse hot hour house how human hundred ice idea if in inch industry interest iron it job
join jump just keep key kill kind king know lake land language large last late law lay lead learn least leave left
leg length less let letter level lie life lift light like line list listen little live local long look lost lot love
low machine made main major make man many map mark market mass master match material matter may me mean measure meat
men metal method middle might mile milk mind mine minute miss modern moment money month moon more most mother motion
mouth move much music must my name nation nature near neck need never new next night nine no noise north nose not
note nothing now number object ocean of off offer office often oil old on once one only open or orange order
original other our out over own oxygen page pair paper parent part party pass past path pattern pay people perhaps
period person phrase picture piece place plain plan plane planet plant play please point poor port position possible
post pound power practice prepare present press pretty print problem process product property pull push put question
quick quiet quite race radio rain raise range rather reach read ready real reason record red region remember repeat
reply rest result rich ride right ring rise river road rock roll room root rose round row rule run safe said salt
same sand save say scale school science sea search season seat second see seed select self sell send sense sent set
seven several shape share sharp she sheet shell shine ship shop shore short should show side sight sign simple since
sing single sit six size skill skin sky sleep slow small snow so soft soil solution some son song soon sound south
space special speech speed spot spread spring square stand star start state station stay step stick still stone
stood stop store story stream street string strong student study subject such sugar summer sun supply support
surface symbol system table tail take talk tall team tell ten term test than thank that the their them then there
these they thick thin thing think third this those though thought three through thus time tiny to together tone too
tool top total touch town track trade train travel tree trip true try tube turn two type under unit until up use
usual value vary very view visit voice wait walk wall want war warm was wash watch water wave way we wear weather
week weight well went were west what wheel when where which while white who whole why wide wife wild will win wind
window wing winter wire with woman wood word work world would write wrong year yellow yes yet you young your
""".split()  # noqa: SIM905 - as a list it would be seven hundred lines
