"""Word lists that texts are made of. No word stands in two lists, so that an answer is never found by accident."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words("""
acorn almanac anchor anvil apron arbour arrow attic awning axle badge balcony banner barge barrel basin basket beacon
bellows bench blanket blossom boiler bonfire bottle boulder bracket bramble brick bridge bridle broom bucket buckle
bundle button cabinet cable candle canvas carpet carriage cart casket cellar chalk chapel chimney chisel cinder circle
clay clover cobble coffer collar column compass copper cord corner cottage cradle crane crate creek crown cupboard
curtain cushion dagger desk dial ditch dome doorway drawer drum easel elm ember engine envelope fabric feather fence
fern ferry fiddle field flask fleece flint fork fossil fountain frame furnace gable garden garland gate ginger glacier
glove granite gravel grove gutter hammer hammock handle harness hatch hedge helmet hinge hollow hook hourglass hull
inkwell island ivy jacket jar jetty jewel kettle keystone kiln knot ladder lagoon lantern lattice lawn leaf ledge lens
letter lever lichen lid lighthouse linen loom lumber magnet mantle maple marble market marsh mast meadow medal mill
mirror mitten moat moss mountain mug needle nest nettle notebook oar oatmeal orchard oven paddle palace paper parade
pasture pebble pencil pendulum pepper pewter picnic pillar pillow pine pipe plank plaster platform plough pocket pond
porch portrait pottery prairie pulley pump quarry quilt raft railing ravine reed ribbon ridge rope rudder saddle sail
salt satchel scaffold scarf school scroll shed shelf shell shield shore shovel shutter sickle signal silo slate sled
slipper spade spindle spire sponge spring stable staircase statue stove straw stream string summit sundial swing table
tarp teapot thicket thimble thread ticket tile timber torch towel tower track trail tray trellis trough trowel trunk
tunnel turnip turret valley vase velvet vessel village vine wagon wardrobe waterfall wheel whistle willow window
windmill wool workshop wreath yard yarn
""")

ADJECTIVES = _words("""
able airy amber ample ancient azure bitter blank bold brave bright brisk broad bronze busy calm careful cheap cheerful
chilly clean clever cloudy coarse cold cosy crisp crooked curious curly damp dark dear deep dense distant dry dull
dusty eager early easy empty even faded faint famous fancy fierce firm flat foggy fragile fresh frosty gentle giant
glad gloomy golden good grand grave great green grey happy hasty heavy hidden honest humble icy idle keen kind large
lazy lean light little lively lonely loose loud low lucky mellow merry mild misty modest muddy narrow neat new noble
noisy northern odd old open orderly pale patient plain pleasant polite proud purple quick quiet rapid rare ready
restless rich robust rough round royal rusty sandy scarlet serious shady shallow sharp shiny shy silent silver simple
sleepy slender slow small smooth snowy soft solid sound southern spare steady steep stern still stormy stout strange
strict strong sturdy subtle sunny sweet swift tall tame tender thick thin tidy tiny tired tough tranquil upper vast
vivid warm weary western wet white wide wild windy wise wooden young
""")

VERBS = _words("""
admired borrowed brought bought built carried checked chose cleaned climbed collected copied counted covered crossed
delivered described dragged drew dropped emptied examined fetched filled found fixed followed forgot gathered guarded
heard held hid kept labelled left lifted locked lost lowered measured mended missed moved noticed opened ordered
packed painted passed photographed picked placed polished praised pulled pushed reached remembered repaired replaced
rolled sanded saved shook showed sketched sold sorted studied swept tested tied took touched traded tried turned
unloaded visited washed watched weighed wrapped
""")

FIRST_NAMES = _words("""
Adela Agnes Alba Alden Alma Ambrose Anders Anouk Arlo Astrid Barnaby Basil Beatrix Bela Benno Bertil Bianca Bodil
Bruno Camille Carys Casper Cecily Cosmo Dagny Dario Delia Desmond Dinah Dorian Edda Edmund Eleni Elias Elspeth Emeka
Enid Esme Ewan Fabian Farid Fenella Fergus Fiona Flora Freya Gareth Gemma Gideon Greta Gustav Halima Hamish Hanne
Hazel Hector Hilda Hugo Ida Idris Imogen Inez Iris Ismael Ivo Jasper Joan Jorge Judith Juno Kamal Karin Keziah Klaus
Lars Leandro Leila Linus Lotte Lucian Magda Malin Marcus Maren Matteo Mabel Milo Mirela Moira Nadia Nils Noor Oriel
Oscar Otto Paloma Pascal Percy Phoebe Quentin Rafael Ramona Renata Rhys Rosalind Rufus Sabine Saskia Selma Silas
Simone Soren Stella Sven Tabitha Tariq Thea Tobias Ursula Valerie Vera Viktor Wanda Wilma Xavier Yara Yusuf Zelda Zora
""")

LAST_NAMES = _words("""
Abernathy Achterberg Adeyemi Aldous Ambler Ashdown Bakshi Barlow Beckwith Bellamy Birch Blackwood Boateng Braddock
Brandvold Brightman Caddick Calloway Carver Castellan Chaudhry Clarendon Colebrook Corrigan Crabtree Cromarty Dalgaard
Darnell Delacroix Devlin Dunmore Eastwick Eklund Ellwood Emsworth Fairfax Falconer Farrow Fenwick Finch Fitzroy
Fontaine Gallagher Garrick Gathercole Gladwin Goodall Grantham Greenhalgh Hadley Halloran Hargreave Hathaway Hawthorn
Hedlund Hollis Holmgren Huxley Ibarra Ingleby Iversen Jagger Jansson Jarvis Kaminski Keating Kendrick Kessler Kirkby
Kowalczyk Langdon Larkin Lindqvist Lockhart Loxley Mallory Marchetti Marlow Mbeki Merriweather Mistry Montague Moreau
Nakamura Nightingale Norling Oakley Odell Okonkwo Ormond Osterman Paget Pembroke Penrose Petrov Pickering Prendergast
Quill Radcliffe Ransome Redfern Ridley Rosewood Rowntree Sanderling Sefton Shackleton Silverman Sommers Stanhope
Steadman Sutcliffe Takahashi Talbot Tennant Thackeray Thornbury Trevelyan Underhill Vandermeer Varga Verity Wainwright
Wakefield Walcott Wetherby Whitlock Winslow Woodrow Yarborough Zielinski
""")

PLACES = _words("""
Aldermoor Ashbourne Balmoth Barrowby Beckhaven Birkdale Blackfen Brackwater Bramhope Brindle Caldbeck Cawdor Claverley
Coldwater Corvale Cranmere Dalby Dunwick Eastmere Edgeholm Elderfield Elmstead Fairhaven Farleigh Fernhill Foxglen
Garlock Glenbarra Gosmere Greywater Halden Harrowgate Hazelwick Highmoor Hollowfield Holmfirth Ironbridge Kelderby
Kingsmarch Kirkholm Langmere Larkhill Lindenau Littlebrook Longreach Lowmoor Marlstone Merrivale Millbrook Mosswick
Netherby Northwold Oakhurst Otterburn Oxmere Pendle Pinewick Queensford Ravensby Redmarsh Ridgeway Rosemarket
Saltmarsh Sandhaven Shelby Silverdale Skelton Southwold Stanmere Stonehouse Summercourt Swanbeck Tamworth Thistledown
Thornwick Tidewell Undercliff Valebridge Wexcombe Whitmoor Wildmere Windrush Wolverton Yarrowby
""")

TRADES = _words("""
baker barber beekeeper blacksmith bookbinder brewer butcher carpenter chemist clockmaker cobbler dentist florist
glazier goldsmith joiner librarian locksmith mason pharmacist plumber potter roofer saddler sculptor shepherd surgeon
surveyor tailor tanner translator weaver welder
""")

ANIMALS = _words("""
badger budgerigar canary chameleon chinchilla cockatoo donkey ferret gecko goldfish goose hamster hedgehog heron llama
lizard magpie mongoose parrot peacock pigeon pony poodle rabbit raven salamander sparrow stork tortoise turtle
""")

INSTRUMENTS = _words("""
accordion bagpipes banjo bassoon bugle cello clarinet cornet cymbals dulcimer flute glockenspiel guitar harmonica harp
harpsichord horn lute lyre mandolin marimba oboe organ piano piccolo recorder saxophone sitar tambourine triangle
trombone trumpet tuba ukulele viola violin xylophone zither
""")

FOODS = _words("""
almonds apricots artichokes asparagus aubergine bananas beetroot blueberries broccoli cabbage carrots celery cherries
chestnuts courgettes cranberries cucumber dates figs gooseberries grapes hazelnuts leeks lemons lentils lobster
mangoes melon mushrooms mussels olives onions oranges oysters papaya parsnips peaches peanuts pears pineapple plums
pumpkin radishes raspberries rhubarb shrimp spinach strawberries tomatoes walnuts
""")

FIELDS = _words("""
account album alarm assay batch berth booking branch budget cargo channel claim client cluster contract coupon courier
customer dataset deposit device docket donor driver escrow folder grant invoice job lease ledger licence locker
machine manifest member merchant order parcel passport payment permit pallet policy project query quote receipt refund
region report reservation route sensor shipment subscription supplier survey task tenant terminal tour trial truck
user vault vendor visa voucher warehouse warranty waybill
""")
